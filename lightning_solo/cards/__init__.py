"""Cards of techniques, the catalogue of all, and configurations made of them; without torch."""
