"""What every kernel costs beside what others run in its place: time on the device and on the host, memory, error."""
