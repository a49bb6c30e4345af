"""Common English words, of which the synthetic users' turns are made."""

from __future__ import annotations

_TEXT = """
about above across after again against agree air all almost along already also always among and answer any apple
around ask back ball base bear because bed before begin behind believe below best better between big bird black blue
boat body book both bottom box boy bread break bring brother build busy but buy call can car carry cause certain chair
change child city class clean clear climb close cloud coast cold color come common complete contain cook corn corner
count country course cover cross cry cut dance dark day deep depend describe desert develop different direct distance
divide doctor dog door down draw dream dress drink drive dry during each early earth east easy eight electric else end
energy enough enter equal even evening ever every example experience explain eye face fact fall family famous far farm
fast father favor few field fight figure fill final find fine finger finish fire first fish five flat floor flow
flower fly follow food forest form forward four free fresh friend from front fruit full game garden gather general
gentle give glad glass gold good govern grand grass gray great green ground group grow half hand happy hard hat have
head hear heart heat heavy help here high hill history hold home hope horse hot hour house how human hundred hunt idea
imagine inch increase indicate industry insect instead interest iron island join joy jump just keep key kind king know
lake land language large last laugh law lay lead learn least leave left less letter level lie life lift light like
line listen little live long look love low machine main make many map mark market matter mean measure meet melody
metal method middle might mile milk mind minute modern money month moon more morning most mother mountain mouth move
much music name nation nature near need never new next night nine noise north note notice number object ocean offer
office often oil once only open opposite orange order other over own page paint paper part pass path pay peace people
perhaps person picture piece place plain plan plane planet plant play please poem point poor port position possible
power practice prepare present press print problem process produce promise proper protect prove pull push question
quick quiet race rain raise reach read ready reason receive record red region remember repeat reply rest result rich
ride right ring rise river road rock roll room root rope round rule run safe sail salt sand say scale school science
sea season seat second seed select sense sentence separate serve seven shade shape share sharp ship shoe shop shore
short shoulder show side sight sign silent silver simple sing sister six size skill sky sleep slow small smell smile
snow social soft soil soldier solution some song soon sound south space speak special speed spell spend spring square
stand star start state station stay steel step still stone stop store story straight strange stream street strong
student study subject such sudden sugar suggest summer sun supply support sure surface surprise swim symbol system
table take talk teach team tell ten test than thank their then there thick thin think third thought thousand three
through time tiny today together tomorrow tone tool top total touch toward town track trade train travel tree triangle
trip trouble true turn twenty under unit until usual valley value vary very view village visit voice wait walk wall
want warm wash watch water wave way wear weather week weight west wheel white whole why wide wild win wind window
winter wire wish woman wonder wood word work world write year yellow yes yesterday young zero
"""
WORDS = tuple(_TEXT.split())
