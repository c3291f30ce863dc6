"""BAGEL: a language model that reads text and pictures, writes text, and draws pictures by flow matching."""
