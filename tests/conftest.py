"""Puts this folder on the import path, so that every kind of test shares `case_data`."""
