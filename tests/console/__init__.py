"""The console in a browser: journeys, keyboard, accessibility, untrusted text, and the pictures in the docs."""
