"""Process launcher: start one process per GPU, join Slurm jobs, report failed ranks."""
