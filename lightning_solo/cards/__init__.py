"""What everyone may know of a technique: its card, the catalogue of all, and what follows from them; without torch."""
