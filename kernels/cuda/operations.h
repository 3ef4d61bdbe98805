/*
 * The operations of a device_backend, which launch kernels. The backend includes it, and so does its emulation
 * in the tests.
 */
#ifndef KERNELS_CUDA_OPERATIONS_H
#define KERNELS_CUDA_OPERATIONS_H

#include "kernels/cuda/dense_read.h"
#include "kernels/cuda/dense_write.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/hash.h"
#include "kernels/cuda/lattice.h"
#include "kernels/cuda/moments.h"
#include "kernels/cuda/split.h"
#include "kernels/cuda/sums.h"
#include "kernels/cuda/symbols.h"

static uint32_t blocks_of_four(uint64_t count) {
    return launch_blocks((count + LATTICE_EACH - 1) / LATTICE_EACH);
}

static device_result run_quantise(const device_queue *queue, const device_tile *tile, device_failure *why) {
    uint64_t blocks = (blocks_of_four(tile->count) + QUANTISE_TURNS - 1) / QUANTISE_TURNS;
    return tile->count ? quantise_tile_launch(queue, (uint32_t)blocks, 1, tile, why) : DEVICE_DONE;
}

static device_result run_move(const device_queue *queue, const device_tile *tile, device_failure *why) {
    return tile->count ? move_tile_launch(queue, blocks_of_four(tile->count), 1, tile, why) : DEVICE_DONE;
}

static device_result run_quantise_levels(const device_queue *queue, const device_levels *tile,
                                         device_failure *why) {
    return tile->count ? quantise_levels_launch(queue, blocks_of_four(tile->count), 1, tile, why)
                       : DEVICE_DONE;
}

static device_result run_move_levels(const device_queue *queue, const device_levels *tile,
                                     device_failure *why) {
    return tile->count ? move_levels_launch(queue, blocks_of_four(tile->count), 1, tile, why) : DEVICE_DONE;
}

static device_result run_keep(const device_queue *queue, const device_exception_copy *keeping,
                              device_failure *why) {
    return keeping->count ? keep_elements_launch(queue, launch_blocks(keeping->count), 1, keeping, why)
                          : DEVICE_DONE;
}

static device_result run_scatter(const device_queue *queue, const device_scattering *scattering,
                                 device_failure *why) {
    return scattering->count
               ? scatter_elements_launch(queue, launch_blocks(scattering->count), 1, scattering, why)
               : DEVICE_DONE;
}

static device_result run_residuals(const device_queue *queue, const device_residuals *residuals,
                                   device_failure *why) {
    uint64_t blocks = (blocks_of_four(residuals->tile.count) + RESIDUAL_TURNS - 1) / RESIDUAL_TURNS;
    return residuals->tile.count ? residual_tile_launch(queue, (uint32_t)blocks, 1, residuals, why)
                                 : DEVICE_DONE;
}

static device_result run_gather(const device_queue *queue, const device_gathering *gathering,
                                device_failure *why) {
    return gathering->slices ? gather_slices_launch(queue, (uint32_t)gathering->slices, 1, gathering, why)
                             : DEVICE_DONE;
}

static device_result run_pack(const device_queue *queue, const device_packing *packing, device_failure *why) {
    uint64_t words = (packing->count + PACK_EACH - 1) / PACK_EACH;
    return words ? pack_q8_launch(queue, launch_blocks(words), 1, packing, why) : DEVICE_DONE;
}

static device_result run_round(const device_queue *queue, const device_rounding *rounding,
                               device_failure *why) {
    uint64_t threads = (rounding->n + ROUND_EACH - 1) / ROUND_EACH;
    return threads && rounding->count
               ? round_factor_launch(queue, launch_blocks(threads), rounding->count, rounding, why)
               : DEVICE_DONE;
}

static device_result run_sums(const device_queue *queue, const device_pass *pass, device_failure *why) {
    uint64_t rows = (pass->phase + pass->count + pass->columns - 1) / pass->columns;
    join_arguments join = {pass->blocks, pass->all, device_pass_blocks(rows)};
    device_result result = DEVICE_DONE;
    if (join.count) {
        result = pass_tile_launch(queue, (uint32_t)join.count, 1, pass, why);
    }
    return result == DEVICE_DONE ? join_blocks_launch(queue, 1, 1, &join, why) : result;
}

static device_result run_columns(const device_queue *queue, const device_columns *columns,
                                 device_failure *why) {
    return sum_columns_launch(queue, launch_blocks(columns->columns), (uint32_t)columns->panels, columns,
                              why);
}

static device_result run_errors(const device_queue *queue, const device_errors *errors, device_failure *why) {
    join_arguments join = {errors->blocks, errors->all, device_error_blocks(errors->count)};
    device_result result = DEVICE_DONE;
    if (join.count) {
        result = error_tile_launch(queue, (uint32_t)join.count, 1, errors, why);
    }
    return result == DEVICE_DONE ? join_blocks_launch(queue, 1, 1, &join, why) : result;
}

static uint32_t blocks_of_moments(uint64_t count) {
    return launch_blocks((count + MOMENTS_EACH - 1) / MOMENTS_EACH);
}

static device_result run_halves(const device_queue *queue, const device_halves *halves, device_failure *why) {
    return halves->count ? halve_moments_launch(queue, blocks_of_moments(halves->count), 1, halves, why)
                         : DEVICE_DONE;
}

static device_result run_updates(const device_queue *queue, const device_updates *updates,
                                 device_failure *why) {
    return updates->count ? find_updates_launch(queue, blocks_of_moments(updates->count), 1, updates, why)
                          : DEVICE_DONE;
}

static device_result run_classify(const device_queue *queue, const device_classes *all, uint32_t count,
                                  uint32_t max, device_failure *why) {
    class_arguments a = {all};
    device_result result = DEVICE_DONE;
    if (count && max) {
        result = count_classes_launch(queue, (max + CLASS_ALL - 1) / CLASS_ALL, count, &a, why);
    }
    return count && max && result == DEVICE_DONE
               ? list_counts_launch(queue, launch_blocks(DEVICE_SYMBOLS * DEVICE_SYMBOLS), count, &a, why)
               : result;
}

static device_result run_split(const device_queue *queue, device_split_step step, const device_split *all,
                               uint32_t count, uint32_t max, device_failure *why) {
    split_arguments a = {all};
    uint32_t blocks = DEVICE_EXTENTS(max);
    if (count == 0 || max == 0) {
        return DEVICE_DONE;
    }
    return step == DEVICE_SPLIT_EXTENT  ? find_extents_launch(queue, blocks, count, &a, why)
           : step == DEVICE_SPLIT_LINES ? sum_lines_launch(queue, blocks, count, &a, why)
                                        : add_levels_launch(queue, blocks, count, &a, why);
}

/* States come first, as only they depend on each other. Numbers of bits then give each thread's position. */
static device_result run_encode(const device_queue *queue, const device_encoding *all, uint32_t count,
                                uint32_t max, device_failure *why) {
    write_arguments a = {all, count};
    device_result result = DEVICE_DONE;
    if (count && max) {
        result = write_tables_launch(queue, DEVICE_STREAM_TABLES, count, &a, why);
    }
    if (count && max && result == DEVICE_DONE) {
        result = write_states_launch(queue, spread_blocks(count), 1, &a, why);
    }
    if (count && max && result == DEVICE_DONE) {
        result = write_sizes_launch(queue, DEVICE_WRITE_GROUPS(max), count, &a, why);
    }
    if (count && max && result == DEVICE_DONE) {
        result = write_bits_launch(queue, DEVICE_WRITE_GROUPS(max), count, &a, why);
    }
    return result;
}

static device_result run_decode(const device_queue *queue, const device_decoding *all, uint32_t count,
                                device_failure *why) {
    read_arguments a = {all, count};
    device_result result = DEVICE_DONE;
    if (count) {
        result = read_tables_launch(queue, DEVICE_STREAM_TABLES, count, &a, why);
    }
    return count && result == DEVICE_DONE ? read_stream_launch(queue, spread_blocks(count), 1, &a, why)
                                          : result;
}

#endif
