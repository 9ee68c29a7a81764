"""Many runs from one command: a fresh process per job, results in one table, and what became of each."""
