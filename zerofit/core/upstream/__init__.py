"""Names of the libraries that zerofit drives which are private, or differ between supported releases."""
