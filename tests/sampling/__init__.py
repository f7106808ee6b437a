"""Tests of sampling, from the noise to the chosen token."""
