"""Garbage collection: it carries out what the retention plan says, each deletion behind the numbered record that allows it."""
