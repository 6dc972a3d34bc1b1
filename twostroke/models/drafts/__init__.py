"""Checks of models and heads that propose tokens for another model."""
