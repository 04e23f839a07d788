"""JSON codecs of immutable values; untrusted input is validated here."""
