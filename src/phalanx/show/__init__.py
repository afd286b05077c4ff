"""What people see of a run: progress, plots, a report. All of it comes from the event log and from nothing else."""
