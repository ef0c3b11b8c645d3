"""Text generation: plain and with images. Features bring other ways to decode."""
