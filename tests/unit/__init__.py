"""Tests of single parts, in folders that mirror the tree."""
