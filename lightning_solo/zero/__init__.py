"""DeepSpeed's ZeRO engine in one process, without Lightning: process group, configuration, clean-up and states."""
