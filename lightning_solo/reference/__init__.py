"""The byte GPT and its data, as a user of Lightning would write them; nothing here imports lightning-solo."""
