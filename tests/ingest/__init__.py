"""Tests of folding journals into the store."""
