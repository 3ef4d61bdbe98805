/*
 * Scenarios of power cuts other than saving and deleting: parity, repair, copies, recovery, failures
 * half-way. These are tests of cmocka.
 */
#ifndef TESTS_SUPPORT_POWER_REST_H
#define TESTS_SUPPORT_POWER_REST_H

void power_parity(void **state);
void power_parity_of_two_files(void **state);
void power_parity_of_dead_maker(void **state);
void power_repair(void **state);
void power_repair_of_parity(void **state);
void power_parity_put_aside(void **state);
void power_copy(void **state);
void power_copy_that_fails(void **state);
void power_copy_that_cannot_be_synced(void **state);
void power_recovery(void **state);
void power_manifest_lost(void **state);
void power_manifest_and_file_lost(void **state);
void power_manifest_lost_and_file_aside(void **state);
void power_save_that_fails(void **state);
void power_compaction_that_fails(void **state);
void power_common_file(void **state);
void power_notes(void **state);
void power_notes_of_the_dead(void **state);
void power_same_step_again(void **state);
void power_lossy(void **state);
void power_early(void **state);
void power_early_collected(void **state);

#endif
