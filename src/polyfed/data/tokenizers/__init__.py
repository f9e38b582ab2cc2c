"""How texts become numbers; one tokenizer a module."""
