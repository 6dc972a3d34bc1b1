"""Figures and pages of reports (`charts`), and the style that all pages share."""
