"""Pages with numbers of few bits: their pools, their attention, and conversions between forms."""
