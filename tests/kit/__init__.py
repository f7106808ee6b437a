"""Tests of the conformance kits."""
