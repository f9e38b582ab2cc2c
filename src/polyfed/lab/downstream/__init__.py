"""What a trained encoder is good for: few-shot classification, segmentation, retrieval."""
