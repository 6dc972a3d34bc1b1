"""Tests of page transports."""
