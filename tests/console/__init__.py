"""The console in a browser: operating, keyboard, accessibility, untrusted text, and the pictures in the docs."""
