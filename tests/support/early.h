/* Stores as early versions left them: manifests that name own files only. */
#ifndef TESTS_SUPPORT_EARLY_H
#define TESTS_SUPPORT_EARLY_H

/* Does that to all manifests of DIR/store, which nobody may have open. Fails the running test on an error. */
void early_store(const char *dir);

#endif
