"""The four ids that every vocabulary begins with; a zeroed tensor is padding."""

PAD, UNK, BOS, EOS = 0, 1, 2, 3
