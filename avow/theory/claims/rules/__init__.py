"""What a proof may use besides arithmetic, by subject: each rule a fact that holds for all it is given."""
