"""Resume records: each field of progress.json that a resumed run must agree with, and random states."""
