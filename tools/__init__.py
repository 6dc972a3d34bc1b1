"""What operators measure, simulate and examine with. It stands above `cluster`, which never imports it."""
