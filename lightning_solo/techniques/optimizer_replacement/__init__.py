"""Optimizer replacement: another optimizer, decay groups and schedule for any module."""
