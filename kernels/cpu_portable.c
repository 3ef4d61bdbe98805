/* The loops of kernels/cpu_loops.h for any processor. */
#define CPU_TABLE kernels_cpu_portable
#define CPU_NAME  "portable"
#define CPU_TARGET
#include "kernels/cpu_loops.h"
