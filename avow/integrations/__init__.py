"""avow inside other people's libraries. Each is optional, and loaded by importing its module here."""
