/* All of the library in one unit, so that the products are compiled once. */
#include "attention.c"
#include "linear.c"
#include "linear_int8.c"
#include "pointwise.c"
#include "argmax.c"
#include "decoder_run.c"
