"""The technique `exact_resume`."""
