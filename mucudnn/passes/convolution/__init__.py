"""Plans of convolutions: fronts, divisions of one workspace among kernels, reasons."""
