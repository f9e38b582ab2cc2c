"""What a trained encoder is good for: few-shot and zero-shot classification, segmentation, retrieval."""
