"""Cards of techniques, the catalogue of all cards, and configurations of techniques; without torch."""
