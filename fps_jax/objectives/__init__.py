"""What is optimised: maths on arrays, for one trajectory or one item."""
