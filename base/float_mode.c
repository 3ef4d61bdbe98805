/*
 * Reads and sets the floating-point control register, in one version per processor. Standard C cannot set how denormals
 * are treated.
 */
#include "base/float_mode.h"

/* Real functions, not inline: the compiler moves no computation across a call with unknown side effects. */

#if defined(__x86_64__)

#define MXCSR_DEFAULT \
    0x1f80u /* to nearest, no flush to zero, denormals are not zeros, all exceptions masked */

float_mode float_mode_enter(void) {
    float_mode saved = {__builtin_ia32_stmxcsr()};
    __builtin_ia32_ldmxcsr(MXCSR_DEFAULT);
    return saved;
}

void float_mode_leave(float_mode saved) {
    __builtin_ia32_ldmxcsr((unsigned)saved.bits);
}

#elif defined(__aarch64__)

float_mode float_mode_enter(void) {
    float_mode saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved.bits));
    __asm__ volatile("msr fpcr, %0" : : "r"(UINT64_C(0))); /* to nearest, no flushing, no traps */
    return saved;
}

void float_mode_leave(float_mode saved) {
    __asm__ volatile("msr fpcr, %0" : : "r"(saved.bits));
}

#else

#include <fenv.h>

float_mode float_mode_enter(void) {
    float_mode saved = {(uint64_t)fegetround()};
    fesetround(FE_TONEAREST);
    return saved;
}

void float_mode_leave(float_mode saved) {
    fesetround((int)saved.bits);
}

#endif
