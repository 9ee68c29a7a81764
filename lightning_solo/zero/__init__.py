"""DeepSpeed's ZeRO engine in one process, without Lightning: its group, its configuration, its traces, its states."""
