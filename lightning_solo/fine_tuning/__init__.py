"""Fine-tuning of Hugging Face's models: modules and data, as a user would write them."""
