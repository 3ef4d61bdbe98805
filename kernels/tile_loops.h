/* Loops over runs of a lossy tile, for encoders; part of kernels/cpu_loops.h, which includes it. */

/*
 * By bits: magnitudes of larger floats, and of what is not a number, are larger integers. The sign of a difference, or of a value that
 * has kept its own, is all that counts in the end.
 */
CPU_LOOP static bool beyond(const float *now, const float *before, const float limits[3], bool positive,
                            size_t n) {
    const uint32_t mask = positive ? UINT32_MAX : INT32_MAX;
    const uint32_t most = scalar_bits(limits[0]), most_before = scalar_bits(limits[1]),
                   most_moved = scalar_bits(limits[2]);
    uint32_t any = 0;
    if (!before) {
        for (size_t i = 0; i < n; i++) {
            uint32_t bits = scalar_bits(now[i]) & mask;
            any |= bits | (most - bits);
        }
    } else {
        for (size_t i = 0; i < n; i++) {
            uint32_t bits = scalar_bits(now[i]) & mask, from = scalar_bits(before[i]) & mask;
            uint32_t moved = scalar_bits(now[i] - before[i]) & INT32_MAX;
            any |= bits | (most - bits) | from | (most_before - from) | (most_moved - moved);
        }
    }
    return any >> 31;
}

CPU_LOOP static void level_fill(float *values, size_t n, const level_run *run) {
    const int32_t row = run->row, birth = run->birth, *column = run->column;
    CPU_NO_CARRY
    for (size_t i = 0; i < n; i++) {
        int32_t level = scalar_level_apply(birth, 0, row + column[i], birth, 0);
        values[i] = scalar_float((uint32_t)level << LEVEL_SHIFT);
    }
}
