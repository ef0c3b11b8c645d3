"""What this machine can do, and the command that mends what it cannot."""
