/* Texts of limited size, JSON strings, decimal numbers, lists of strings. Implemented in text.c. */
#ifndef TEXT_H
#define TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define COUNT_OF(array) (sizeof(array) / sizeof *(array))

struct text {
    char *data;
    size_t size, used;
};

/* `items` ends with NULL once it has an item. */
struct strings {
    char **items;
    size_t count, room;
};

__attribute__((format(printf, 2, 3))) void put(struct text *t, const char *format, ...);
void put_string(struct text *t, const char *value);
void put_field(struct text *t, const char *key, const char *value);
bool parse_number(const char *text, uint64_t most, uint64_t *value);
bool push(struct strings *list, char *item);

#endif
