"""The monitor as a part of other libraries' trainers: one module for each library, imported only by name."""
