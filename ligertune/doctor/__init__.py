"""Checks of `ligertune doctor`: installed software, device and host, each with a command that fixes a problem."""
