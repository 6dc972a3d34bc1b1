"""Figures as inline SVG and the pages around them, shared by reports of several commands. Nothing is ever fetched.

axes    numbers to pixels, and the round numbers beside them
svg     a figure's frame: grid, labels
charts  lines, points, bars and percentiles over axes
page    the template engine and the style that all pages share
"""
