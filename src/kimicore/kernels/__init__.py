"""Operations of the device tower: a torch reference of each, and a native version where one is faster."""
