"""Static analysis of a foreign callback class: which attributes it uses, without a run or an instance."""
