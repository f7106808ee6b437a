"""What tests and conformance kits share: a clock that is set by hand and a runner without a device."""
