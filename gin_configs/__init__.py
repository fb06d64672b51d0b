"""Gin configs, a package so that T5X and an installed wheel find them."""
