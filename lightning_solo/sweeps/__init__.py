"""Many runs from one command: a fresh process per job, and the status and result of each in one table."""
